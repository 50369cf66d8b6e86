"""Files to tables; every oddity of a format ends here."""
