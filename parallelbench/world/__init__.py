"""What a rank stands on: its place among the ranks, its devices, and their arithmetic."""
