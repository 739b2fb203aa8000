"""Speed on an NVIDIA GPU, beside torch and the least that moving the data would take."""
