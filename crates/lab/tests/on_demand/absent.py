"""Functions for the programs of this directory: they parse addresses, and read bodies without looking at them (so that
the bodies' bytes need not come to this machine)."""
import socket


def address(text):
    host, port = text.rsplit(":", 1)
    return host, int(port)


def body(buffer, of, path, length):
    """Reads the body of `path` from the server at `of` into `buffer`, without looking at it. Returns a view of
    the body."""
    upstream = socket.create_connection(of)
    upstream.sendall(f"GET {path} HTTP/1.1\r\nHost: body\r\n\r\n".encode())
    view = memoryview(buffer)
    begins, end = 0, 0
    while not begins:
        end += upstream.recv_into(view[end:], 4096)
        begins = bytes(view[:end]).find(b"\r\n\r\n") + 4 if b"\r\n\r\n" in bytes(view[:end]) else 0
    while end < begins + length:
        got = upstream.recv_into(view[end:])
        if not got:
            raise EOFError("the body is short")
        end += got
    upstream.close()
    return view[begins : begins + length]
