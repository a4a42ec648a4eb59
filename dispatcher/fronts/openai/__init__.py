"""OpenAI's API (models, completions, chat completions) for families that generate text."""
