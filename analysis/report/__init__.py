"""What a report shows: its page, and tables and figures for a publication."""
