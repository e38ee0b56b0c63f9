"""Local tensor operations: a plain-torch reference and, where it pays, a kernel."""
