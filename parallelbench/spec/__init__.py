"""What a run is: its configuration, checked; torch-free."""
