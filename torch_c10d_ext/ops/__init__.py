"""One module per collective: its functions, its batching rule and its Inductor lowering."""
