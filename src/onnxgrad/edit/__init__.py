"""Models changed before they are trained: new heads, parts, adapters, quantization."""
