"""What will travel, in which order, and the digest that says whether it arrived."""
