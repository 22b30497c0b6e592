"""The addresses of the API. They are thin: services that know no web do the work."""
