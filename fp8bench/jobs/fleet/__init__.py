"""A fleet: one request cut into cells, which processes on one machine or many measure into one store."""
