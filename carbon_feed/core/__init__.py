"""What a reading is worth, when to ask again, what stands in for one, and pieces of the past; pure."""
