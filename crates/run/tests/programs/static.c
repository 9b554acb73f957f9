/* Sends back the complement of each byte that comes over the connections of an inherited
 * listener, one connection after the other. It is linked statically, so that no library is
 * loaded into it. Its argument is the listener's descriptor. */
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

int main(int count, char **arguments)
{
    static char buffer[65536];

    if (count != 2 || puts("ready") < 0 || fflush(stdout))
        return 2;
    for (;;) {
        int client = accept(atoi(arguments[1]), NULL, NULL);
        ssize_t got;

        if (client < 0)
            return 1;
        while ((got = read(client, buffer, sizeof(buffer))) > 0) {
            for (ssize_t at = 0; at < got; at++)
                buffer[at] = ~buffer[at];
            for (ssize_t done = 0, more; done < got; done += more)
                if ((more = write(client, buffer + done, got - done)) < 0)
                    return 1;
        }
        close(client);
    }
}
