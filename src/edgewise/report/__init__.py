"""What was measured, for people: tables, figures and one self-contained page."""
