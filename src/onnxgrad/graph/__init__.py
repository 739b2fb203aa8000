"""A graph while it is being written: values that compute with operators, nodes through their schema, the builder."""
