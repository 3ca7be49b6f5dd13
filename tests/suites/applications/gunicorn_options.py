"""The options of gunicorn. All options that make it tolerate invalid requests are set."""

worker_class = "gthread"
workers = 1
threads = 8
keepalive = 75
loglevel = "critical"
header_map = "dangerous"
permit_obsolete_folding = True
permit_unconventional_http_method = True
permit_unconventional_http_version = True
strip_header_spaces = True
casefold_http_method = True
limit_request_line = 0
limit_request_field_size = 0
control_socket_disable = True
