"""The advantages of a batch: columns of its episodes, the plug-ins' calls, and their memory."""
