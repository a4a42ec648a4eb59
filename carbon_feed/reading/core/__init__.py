"""What a reading is worth, when to ask again, what stands in for one; pure."""
