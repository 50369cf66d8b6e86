"""Results to one offline HTML file."""
