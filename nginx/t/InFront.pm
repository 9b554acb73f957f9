package InFront;

# perl -MInFront: the HTTP servers of a file of nginx-tests have tiers in front of them (tiers.py).
#
# A server that listens on 127.0.0.1, with plain HTTP/1, listens on IN_FRONT_LISTEN, too. A connection of the test to such
# a server is made to IN_FRONT_CONNECT instead, from the network namespace IN_FRONT_FROM. Its port is the server's, plus
# IN_FRONT_PORTS. All other connections (the servers' own, TLS, HTTP/2, mail, streams) stay on the loopback.

use warnings;
use strict;

use IO::Socket;
use Socket;
use Test::Nginx;

use constant SYS_SETNS => 308;
use constant CLONE_NEWNET => 0x40000000;

my ($listen, $connect, $from, $more) = @ENV{map { "IN_FRONT_$_" } qw/LISTEN CONNECT FROM PORTS/};
my %fronted;

open(my $there, '<', $from) or die "$from: $!";
open(my $here, '<', '/proc/self/ns/net') or die "/proc/self/ns/net: $!";

# Returns the configuration, in which each such server also listens on IN_FRONT_LISTEN.
sub in_front {
	my ($text) = @_;
	my ($depth, $http, %plain, %other) = (0, 0);
	my @lines = split /^/, $text;

	foreach (@lines) {
		$http = $depth + 1 if /^\s*http\s*\{/;
		my ($port, $options) = /^\s*listen\s+127\.0\.0\.1:(8\d\d\d)\b([^;]*);/;
		if (defined $port) {
			my $is_plain = $http && $options !~ /\b(ssl|http2|proxy_protocol|udp|reuseport)\b/;
			($is_plain ? \%plain : \%other)->{$port} = 1;
		}
		$depth += () = /\{/g;
		$depth -= () = /\}/g;
		$http = 0 if $depth < $http;
	}

	%fronted = map { $_ => 1 } grep { !$other{$_} } keys %plain;

	foreach (@lines) {
		s/^(\s*listen\s+)127\.0\.0\.1:(8\d\d\d)\b([^;]*;)/$fronted{$2} ? "$&$1$listen:$2$3" : $&/e;
	}

	return join '', @lines;
}

no warnings qw/ redefine prototype /;

my $write_file = \&Test::Nginx::write_file;
*Test::Nginx::write_file = sub {
	my ($self, $name, $content) = @_;
	$content = in_front($content) if $name eq 'nginx.conf';
	return $write_file->($self, $name, $content);
};

my $connect_socket = \&IO::Socket::connect;
*IO::Socket::connect = sub {
	my ($socket, $address) = @_;
	$address = tiers_address($socket, $address) || $address;
	return $connect_socket->($socket, $address);
};

# For a connection to a server that has tiers in front: makes the socket again, on the client's host, and returns the
# address to connect to. Returns nothing for all other connections.
sub tiers_address {
	my ($socket, $address) = @_;

	return if sockaddr_family($address) != AF_INET;
	my ($port, $host) = unpack_sockaddr_in($address);
	return if !$fronted{$port} || inet_ntoa($host) ne '127.0.0.1';
	my ($bound) = unpack_sockaddr_in(getsockname($socket));
	return if $bound;

	my $blocking = $socket->blocking();
	syscall(SYS_SETNS, fileno($there), CLONE_NEWNET) == 0 or die "setns: $!";
	my $made = CORE::socket($socket, PF_INET, SOCK_STREAM, 0);
	my $error = $!;
	syscall(SYS_SETNS, fileno($here), CLONE_NEWNET) == 0 or die "setns: $!";
	$made or die "socket: $error";
	$socket->blocking($blocking);

	return pack_sockaddr_in($port + $more, inet_aton($connect));
}

1;
