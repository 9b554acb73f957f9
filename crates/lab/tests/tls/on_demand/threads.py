"""A TLS server with a thread for each connection and blocking calls. It passes each request on to another server over
plain TCP, and the response back to the client. Arguments: the address at which it listens, the files with its
certificate and key, and the address of the other server."""
import socket
import ssl
import sys
import threading


def address(text):
    host, port = text.rsplit(":", 1)
    return host, int(port)


def head(read):
    """Reads byte by byte up to the end of a header."""
    got = b""
    while not got.endswith(b"\r\n\r\n"):
        byte = read(1)
        if not byte:
            return b""
        got += byte
    return got


def serve(client, of):
    upstream = socket.create_connection(of)
    buffer = memoryview(bytearray(256 << 10))
    while request := head(client.recv):
        upstream.sendall(request)
        answer = head(upstream.recv)
        client.sendall(answer)
        lines = answer.decode().lower().split("\r\n")
        left = next(int(line.split(": ")[1]) for line in lines if line.startswith("content-length: "))
        while left:
            got = upstream.recv_into(buffer, min(left, len(buffer)))
            if not got:
                raise EOFError("the body is short")
            client.sendall(buffer[:got])
            left -= got
    client.unwrap()


def main():
    listens, certificate, key, of = sys.argv[1:]
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    listener = socket.create_server(address(listens), backlog=64)

    def one(connection):
        try:
            with context.wrap_socket(connection, server_side=True) as client:
                serve(client, address(of))
        except OSError as error:
            print(error, flush=True)

    while True:
        connection, _ = listener.accept()
        threading.Thread(target=one, args=(connection,), daemon=True).start()


main()
