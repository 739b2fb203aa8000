"""What is asked of a model: its gradient, products of its Hessian, and the check against central differences."""
