/*
 * Relay with Boost.Asio's coroutines, each of which reads on its own stack. It accepts four
 * connections, and passes on what comes over them, both ways, until all have ended.
 *
 *     asio relay PORT NEXT SEED
 */
#define BOOST_ALLOW_DEPRECATED_HEADERS
#define BOOST_COROUTINES_NO_DEPRECATION_WARNING
#include <boost/asio.hpp>
#include <boost/asio/spawn.hpp>
#include <cstdio>
#include <cstdlib>
#include <memory>

namespace asio = boost::asio;
using asio::ip::tcp;

constexpr int CONNECTIONS = 4;
constexpr std::size_t ROOM = 128 << 10;

struct Pair {
    tcp::socket client, next;
};

static void pass_on(tcp::socket &from, tcp::socket &to, asio::yield_context yield)
{
    char bytes[ROOM];
    unsigned long turn = 0;
    for (;;) {
        boost::system::error_code ended;
        std::size_t got = from.async_read_some(asio::buffer(bytes), yield[ended]);
        if (ended == asio::error::eof)
            break;
        if (ended)
            throw boost::system::system_error(ended);
        /* Every third time, reads one byte and writes it back: this touches the memory. */
        if (++turn % 3 == 0) {
            volatile char *one = &bytes[turn * 4099 % got];
            *one = *one;
        }
        asio::async_write(to, asio::buffer(bytes, got), yield);
    }
    to.shutdown(tcp::socket::shutdown_send);
}

static void take(asio::io_context &context, tcp::acceptor &acceptor, const tcp::endpoint &next, asio::yield_context yield)
{
    boost::coroutines::attributes stack(4 * ROOM);
    for (int number = 0; number < CONNECTIONS; number++) {
        auto pair = std::make_shared<Pair>(Pair{tcp::socket(context), tcp::socket(context)});
        acceptor.async_accept(pair->client, yield);
        boost::system::error_code refused;
        do {
            pair->next.close();
            pair->next.async_connect(next, yield[refused]);
        } while (refused == asio::error::connection_refused);
        if (refused)
            throw boost::system::system_error(refused);
        asio::spawn(context, [pair](asio::yield_context own) { pass_on(pair->client, pair->next, own); }, stack);
        asio::spawn(context, [pair](asio::yield_context own) { pass_on(pair->next, pair->client, own); }, stack);
    }
}

int main(int count, char **arguments)
{
    if (count != 5)
        return 2;
    try {
        asio::io_context context;
        auto loopback = asio::ip::address_v4::loopback();
        tcp::acceptor acceptor(context, {loopback, static_cast<unsigned short>(std::atoi(arguments[2]))});
        tcp::endpoint next(loopback, static_cast<unsigned short>(std::atoi(arguments[3])));
        asio::spawn(context, [&](asio::yield_context own) { take(context, acceptor, next, own); });
        context.run();
    } catch (const std::exception &error) {
        std::fprintf(stderr, "asio: %s\n", error.what());
        return 1;
    }
}
