"""How long it takes, and to what quality: this library, the head, other libraries."""
