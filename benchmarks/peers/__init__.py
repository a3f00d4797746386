"""What one would use in place of this library."""
