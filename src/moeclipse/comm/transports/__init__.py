"""How rows travel between ranks: one interface, several wires."""
