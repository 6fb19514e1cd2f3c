"""Where the models of jobs come from: folders, a hub of Hugging Face, object stores."""
