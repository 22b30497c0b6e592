"""What each address of the API answers: thin, the work is done by services that know no web."""
