"""Matrix products: by vectors on any processor, by AMX where there is such, and transposes."""
