"""What goes on now, as a frame of a given size that is drawn again and again."""
