"""What is generated next, and what plug-ins remember of what became of it."""
