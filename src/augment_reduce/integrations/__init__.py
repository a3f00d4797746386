"""Integrations with other libraries, one optional module each."""
