"""Other people's libraries, one module each; none of them is needed by anything else here."""
