"""How fast softmax attention becomes linear attention."""
