"""The reference against torch and Hugging Face transformers, which share no code with it."""
