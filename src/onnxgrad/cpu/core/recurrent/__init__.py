"""GRU, LSTM and RNN: forward and backward steps, and the large products before and after them."""
