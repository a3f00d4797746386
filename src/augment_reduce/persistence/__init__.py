"""Model files: safetensors and JSON, checked entry by entry."""
