"""Writes a whole body to each client that sends "w". To other clients, it writes only the beginning of the body, with
sockets that do not block. When enough clients have got the beginning, it accepts one more connection, and waits for a
byte there.

Then it does one of two things with the last client that has got the beginning. With "goes on", it tries to write the
rest to this client at once, and later writes what was left. With "closes", it closes this client's connection, and
writes "hello" to a new client whose connection gets the same descriptor number. In both cases, it reports on the
additional connection how the first write went: "went on", "is full" or "is lost".

Arguments: the address at which it listens, the address of the server with the body, the body's path and length, the
length of the beginning, the number of clients that get only the beginning, and "goes on" or "closes"."""
import select
import socket
import sys

from absent import address, body


def rest(client, whole, done, room):
    """Writes the bytes of `whole` after the first `done`, whenever the socket has room."""
    while done < len(whole):
        if not room.poll(60):
            sys.exit(f"no room after {done} bytes")
        try:
            while done < len(whole):
                done += client.send(whole[done:])
        except BlockingIOError:
            pass


def tried(client, what):
    """Tries to write once. Returns how many bytes need not be written again, and a report of 7 bytes."""
    try:
        return client.send(what), b"went on"
    except BlockingIOError:
        return 0, b"is full"
    except ConnectionResetError:
        return len(what), b"is lost"


def main():
    listens, of, path, length, beginning, clients, then = sys.argv[1:]
    length, done = int(length), int(beginning)
    listener = socket.create_server(address(listens))
    buffer = bytearray(length + 65536)
    begun = []
    while len(begun) < int(clients):
        client, _ = listener.accept()
        if client.recv(1) == b"w":
            client.sendall(body(buffer, address(of), path, length))
            client.close()
            continue
        if not begun:
            whole = body(buffer, address(of), path, length)
        client.setblocking(False)
        if client.send(whole[:done]) != done:
            sys.exit("the beginning does not fit")
        begun.append(client)
    other, _ = listener.accept()
    client = begun.pop()
    room = select.epoll()
    room.register(client, select.EPOLLOUT | select.EPOLLET)
    other.recv(1)
    if then == "closes":
        number = client.fileno()
        client.close()
        client, _ = listener.accept()
        if client.fileno() != number:
            sys.exit(f"{client.fileno()} in place of {number}")
        client.setblocking(False)
        other.sendall(tried(client, b"hello")[1])
    else:
        while room.poll(0):
            pass
        more, said = tried(client, whole[done:])
        other.sendall(said)
        rest(client, whole, done + more, room)
    client.close()


main()
