"""What each process of a run does, room by room, and the parent that starts them and judges what they recorded."""
