//! Parser for the output of `nginx -T`, which is nginx's whole configuration. It takes the parts that matter to Shunt:
//! the addresses at which servers listen, Shunt's directives, and directives of nginx that matter for them.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

/// Source of nginx's configuration.
#[derive(Clone, Debug)]
pub enum Servers {
    /// Output of this program with the option `-T`.
    Program(PathBuf),
    /// A file with the output of `nginx -T`.
    File(PathBuf),
    /// No source: the configuration is not read.
    Nowhere,
}

impl Servers {
    /// Program that is run if the operator names no other.
    pub const PROGRAM: &str = "nginx";
}

/// Name and parameters of one directive.
type Directive = Vec<String>;

/// Numbers of the blocks that a directive stands in, from the outermost block to the innermost. `nginx -T` prints
/// included files one after the other, so for directives of an included file, the blocks around its `include` are not
/// known.
type Place = Vec<usize>;

/// Version of nginx, such as 1.22.1.
pub(crate) type Version = [u32; 3];

/// The parts of nginx's configuration that matter to Shunt.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Served {
    /// Addresses at which servers listen. The wildcard address stands for all addresses of the machine.
    pub(crate) addresses: Vec<SocketAddr>,
    /// Whether the configuration has `shunt on`.
    pub(crate) hands_off: bool,
    /// Whether the configuration has `shunt_offer on`.
    pub(crate) offers: bool,
    /// Whether some `shunt_trust` names an address.
    pub(crate) trusts: bool,
    /// Whether some `shunt_trust` names every address, and so also clients' addresses, and applies at a place where
    /// `shunt on` applies, too.
    pub(crate) trusts_clients: bool,
    /// Whether some `shunt_offer on` stands where `sendfile` is off, or there is `shunt_offer on` and no `sendfile on`
    /// anywhere.
    pub(crate) offers_without_sendfile: bool,
    /// Whether some server has `listen ... ssl`.
    pub(crate) listens_with_tls: bool,
    /// Whether some `ssl_protocols` names TLSv1.3. `None` where there is no `ssl_protocols`.
    pub(crate) names_tls13: Option<bool>,
    /// Version of the nginx that has this configuration. `None` where no program was asked for it.
    pub(crate) version: Option<Version>,
    /// Path of the socket that `shunt_agent` names, if any.
    pub(crate) agent: Option<String>,
    /// User of the workers, and perhaps their group, if the configuration names them (`user`).
    pub(crate) user: Option<(String, Option<String>)>,
}

impl Served {
    /// Parses a whole configuration.
    pub(crate) fn parse(text: &str) -> Self {
        let mut served = Self::default();
        let all = directives(text);
        for (_, directive) in &all {
            let words: Vec<&str> = directive.iter().map(String::as_str).collect();
            match words[..] {
                ["listen", at, ref how @ ..] => {
                    served.addresses.extend(listens_at(at));
                    served.listens_with_tls |= how.contains(&"ssl");
                }
                ["ssl_protocols", ref named @ ..] => {
                    served.names_tls13 = Some(served.names_tls13.unwrap_or(false) || named.contains(&"TLSv1.3"));
                }
                ["shunt", "on"] => served.hands_off = true,
                ["shunt_offer", "on"] => served.offers = true,
                ["shunt_trust", first, ..] => served.trusts |= first != "none",
                ["shunt_agent", path] => served.agent = Some(path.trim_start_matches("unix:").to_owned()),
                ["user", user] => served.user = Some((user.to_owned(), None)),
                ["user", user, group] => served.user = Some((user.to_owned(), Some(group.to_owned()))),
                _ => {}
            }
        }
        served.addresses.sort_unstable();
        served.addresses.dedup();
        served.trusts_clients = trusts_clients(&all);
        served.offers_without_sendfile = offers_without_sendfile(&all);
        served
    }
}

/// Returns the place of each directive that has this name, and parameters for which `are_so` is true.
fn places<'a>(
    all: &'a [(Place, Directive)],
    name: &'a str,
    are_so: impl Fn(&[String]) -> bool + 'a,
) -> impl Iterator<Item = &'a Place> {
    all.iter().filter(move |(_, words)| words[0] == name && are_so(&words[1..])).map(|(place, _)| place)
}

fn flag(value: &str) -> impl Fn(&[String]) -> bool {
    move |words| words == [value]
}

/// Returns whether clients' addresses are trusted where `shunt` is on ([`Served::trusts_clients`]). False in doubtful
/// cases: if an inner block has another `shunt_trust`, or if `shunt off` stands in the same block or in an inner one.
/// Also false for a `shunt_trust` outside all blocks, as in an included file.
fn trusts_clients(all: &[(Place, Directive)]) -> bool {
    const ALL: [&str; 3] = ["all", "0.0.0.0/0", "::/0"];
    let has_all = |words: &[String]| words.iter().any(|word| ALL.contains(&word.as_str()));
    places(all, "shunt_trust", has_all).filter(|at| !at.is_empty()).any(|at| {
        let is_narrowed = places(all, "shunt_trust", |_| true).any(|below| below.starts_with(at) && below != at);
        let is_off = places(all, "shunt", flag("off")).any(|below| below.starts_with(at));
        let is_on = places(all, "shunt", flag("on")).any(|on| on.starts_with(at) || at.starts_with(on));
        is_on && !is_narrowed && !is_off
    })
}

/// Returns whether files are offered where `sendfile` is off, as it is by default
/// ([`Served::offers_without_sendfile`]).
fn offers_without_sendfile(all: &[(Place, Directive)]) -> bool {
    let is_on_below = |at: &Place| places(all, "sendfile", flag("on")).any(|below| below.starts_with(at));
    let is_off = |at: &Place| places(all, "sendfile", flag("off")).any(|off| off == at);
    places(all, "shunt_offer", flag("on")).any(|at| {
        let is_off_here = !at.is_empty() && is_off(at) && !is_on_below(at);
        is_off_here || !is_on_below(&Place::new())
    })
}

/// Returns why nginx refuses its configuration, in nginx's words: the first message of level `emerg`, without time and
/// process number. `None` where the text has no such message.
pub(crate) fn refusal(text: &str) -> Option<String> {
    const LEVEL: &str = "[emerg] ";
    let said = text.lines().find_map(|line| line.find(LEVEL).map(|at| &line[at + LEVEL.len()..]))?;
    let is_process = |word: &str| word.contains('#') && word.chars().all(|c| c.is_ascii_digit() || c == '#');
    let why = said.split_once(": ").filter(|(process, _)| is_process(process)).map_or(said, |(_, why)| why);
    Some(format!("{LEVEL}{why}"))
}

/// Returns whether a text has no directive. For a configuration that nginx refuses, `nginx -T` prints no directives.
pub(crate) fn is_empty(text: &str) -> bool {
    directives(text).is_empty()
}

/// Returns the version in the output of `nginx -v`: `nginx version: nginx/1.22.1 (Ubuntu)`.
pub(crate) fn version(said: &str) -> Option<Version> {
    let number = said.split_once("nginx/")?.1.split_whitespace().next()?;
    let parts: Vec<u32> = number.split('.').map_while(|part| part.parse().ok()).collect();
    parts.try_into().ok()
}

/// Parses the address of a `listen`: `80`, `10.0.0.1`, `10.0.0.1:80`, `*:80`, `[::]:80`. Returns `None` for Unix
/// sockets and host names.
fn listens_at(text: &str) -> Option<SocketAddr> {
    let wildcard = IpAddr::from([0; 4]);
    if let Ok(port) = text.parse() {
        return Some(SocketAddr::new(wildcard, port));
    }
    if let Some(port) = text.strip_prefix("*:") {
        return Some(SocketAddr::new(wildcard, port.parse().ok()?));
    }
    let bare = text.trim_start_matches('[').trim_end_matches(']');
    text.parse().ok().or_else(|| bare.parse().ok().map(|address| SocketAddr::new(address, 80)))
}

/// Splits a configuration into directives, each with its place. Comments, quotes and blocks are treated as by
/// ngx_conf_read_token(), but escapes are not.
fn directives(text: &str) -> Vec<(Place, Directive)> {
    let (mut all, mut words, mut word) = (Vec::new(), Directive::new(), String::new());
    let (mut place, mut blocks) = (Place::new(), 0);
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        match c {
            '#' if word.is_empty() => while chars.next().is_some_and(|c| c != '\n') {},
            '"' | '\'' if word.is_empty() => words.push(chars.by_ref().take_while(|next| *next != c).collect()),
            ';' | '{' | '}' => {
                words.extend((!word.is_empty()).then(|| std::mem::take(&mut word)));
                all.extend((!words.is_empty()).then(|| (place.clone(), std::mem::take(&mut words))));
                match c {
                    '{' => {
                        place.push(blocks);
                        blocks += 1;
                    }
                    '}' => drop(place.pop()),
                    _ => {}
                }
            }
            c if c.is_whitespace() => words.extend((!word.is_empty()).then(|| std::mem::take(&mut word))),
            c => word.push(c),
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_relevant_directives_are_found() {
        let text = "# configuration file /etc/nginx/nginx.conf:\nhttp {\n  shunt_agent unix:/run/a.sock; # here\n\
                    shunt on; shunt_trust 10.0.0.0/24;\n server { listen 80; listen [::]:80 ipv6only=on; listen 10.0.0.2:443 ssl;\n\
                    listen unix:/x; server_name \"a;b\"; location / { return 200 'listen 99;'; } } }";
        let served = Served::parse(text);
        let at = |text: &str| text.parse::<SocketAddr>().unwrap();
        assert_eq!(served.addresses, [at("0.0.0.0:80"), at("10.0.0.2:443"), at("[::]:80")]);
        assert!(served.hands_off && served.trusts && !served.offers);
        assert_eq!(served.agent.as_deref(), Some("/run/a.sock"));
    }

    #[test]
    fn trust_in_every_address_where_clients_connect_is_noticed() {
        let of = |text: &str| Served::parse(text).trusts_clients;
        assert!(of("http { server { listen 80; shunt on; shunt_trust all; } }"));
        assert!(of("http { shunt_trust ::/0 10.0.0.1; server { location / { shunt on; } } }"));
        assert!(of("http { shunt on; server { shunt_trust 0.0.0.0/0; } }"));
        for good in [
            "http { server { shunt on; shunt_trust 10.0.0.0/24; } }",
            "http { server { shunt on; shunt_trust 10.0.0.1; } server { shunt_offer on; shunt_trust all; } }",
            "http { shunt_trust all; server { shunt on; shunt_trust 10.0.0.1; } }",
            "http { shunt on; server { shunt off; shunt_trust all; } }",
            "http { server { shunt_offer on; shunt_trust all; } }",
        ] {
            assert!(!of(good), "{good}");
        }
    }

    #[test]
    fn a_server_that_offers_uses_sendfile() {
        let of = |text: &str| Served::parse(text).offers_without_sendfile;
        assert!(of("http { server { shunt_offer on; } }"), "nginx's default");
        assert!(of("http { sendfile off; server { location / { shunt_offer on; } } }"));
        assert!(of("http { sendfile on; server { sendfile off; shunt_offer on; location / { root /x; } } }"));
        for good in [
            "http { sendfile on; server { shunt_offer on; } }",
            "http { sendfile on; include x; }\n# configuration file x:\nserver { shunt_offer on; }",
            "http { server { sendfile off; shunt_offer on; location / { sendfile on; } } }",
            "http { sendfile on; server { shunt_offer on; location /g { sendfile off; shunt_offer off; } } }",
            "http { server { shunt on; } }",
        ] {
            assert!(!of(good), "{good}");
        }
    }

    #[test]
    fn tls_is_that_of_listeners_with_ssl_and_its_versions_those_that_are_named() {
        let of = |text: &str| {
            let served = Served::parse(text);
            (served.listens_with_tls, served.names_tls13)
        };
        assert_eq!(of("server { listen 80; }"), (false, None));
        assert_eq!(of("server { listen 443 default_server ssl http2; }"), (true, None));
        assert_eq!(of("http { ssl_protocols TLSv1.2; server { listen 443 ssl; } }"), (true, Some(false)));
        let text = "http { ssl_protocols TLSv1.2 TLSv1.3; server { listen 443 ssl; ssl_protocols TLSv1.2; } }";
        assert_eq!(of(text), (true, Some(true)));
    }

    #[test]
    fn nginx_says_its_version_and_why_it_refuses() {
        assert_eq!(version("nginx version: nginx/1.22.1\n"), Some([1, 22, 1]));
        assert_eq!(version("nginx version: nginx/1.24.0 (Ubuntu)\n"), Some([1, 24, 0]));
        assert_eq!(version("no such thing"), None);
        let said = "2026/11/23 14:25:37 [warn] 3#3: x\n2026/11/23 14:25:37 [emerg] 3#3: unknown directive \"shnut\" in /etc/n:2\n\
                    nginx: configuration file /etc/n test failed\n";
        assert_eq!(refusal(said).as_deref(), Some("[emerg] unknown directive \"shnut\" in /etc/n:2"));
        assert_eq!(refusal("nginx: [emerg] open(): no\n").as_deref(), Some("[emerg] open(): no"));
        assert!(refusal("http { }").is_none() && is_empty("# nothing\n") && !is_empty("http { }"));
    }

    #[test]
    fn comments_are_no_directives() {
        let served = Served::parse("http { #shunt on;\n shunt_trust none; server { listen 10.0.0.2; } }");
        assert!(!served.hands_off && !served.trusts && served.user.is_none());
        let named = |text| Served::parse(text).user;
        assert_eq!(named("user www-data;"), Some(("www-data".into(), None)));
        assert_eq!(named("user web www;"), Some(("web".into(), Some("www".into()))));
        assert_eq!(served.addresses, ["10.0.0.2:80".parse().unwrap()]);
    }
}
