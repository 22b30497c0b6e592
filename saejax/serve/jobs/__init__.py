"""Work that the page starts: checked settings, processes that outlive the server, and what became of them."""
