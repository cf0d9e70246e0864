"""What `auto` is made of: contexts, belief, growth; functions on arrays."""
