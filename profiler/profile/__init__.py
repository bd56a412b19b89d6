"""What a profile is: its tables, its file, the devices, and what there is to measure."""
