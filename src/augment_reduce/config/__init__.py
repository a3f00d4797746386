"""Default settings and presets, feature scaling, label encoding, validation of parameters."""
