"""Programs in C++ that test the parts of the extension that need no torch."""
