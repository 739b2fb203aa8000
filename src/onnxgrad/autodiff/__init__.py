"""How a model is differentiated: the engine that applies the rules, and the check against central differences."""
