"""What operators of one family share: recurrent ones, their activation functions, and sliding windows."""
