//! What `nginx -T` says, as far as it matters here: the addresses that servers listen at, and Shunt's directives.

use std::net::{IpAddr, SocketAddr};

/// One directive and its parameters.
type Directive = Vec<String>;

/// What is served.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Served {
    /// Addresses that servers listen at; the wildcard where they listen everywhere.
    pub(super) addresses: Vec<SocketAddr>,
    /// `shunt on` stands somewhere.
    pub(super) hands_off: bool,
    /// `shunt_offer on` stands somewhere.
    pub(super) offers: bool,
    /// `shunt_trust` names somebody.
    pub(super) trusts: bool,
    /// What `shunt_agent` names.
    pub(super) agent: Option<String>,
    /// The user that its workers become, and the group, where the configuration names them.
    pub(super) user: Option<(String, Option<String>)>,
}

impl Served {
    /// Of a whole configuration.
    pub(super) fn parse(text: &str) -> Self {
        let mut served = Self::default();
        for directive in directives(text) {
            let words: Vec<&str> = directive.iter().map(String::as_str).collect();
            match words[..] {
                ["listen", at, ..] => served.addresses.extend(listens_at(at)),
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
        served
    }
}

/// `80`, `10.0.0.1`, `10.0.0.1:80`, `*:80`, `[::]:80`; `None` for Unix sockets and names.
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

/// Comments, quotes and blocks as ngx_conf_read_token() has them, but for escapes.
fn directives(text: &str) -> Vec<Directive> {
    let (mut all, mut words, mut word) = (Vec::new(), Directive::new(), String::new());
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        match c {
            '#' if word.is_empty() => while chars.next().is_some_and(|c| c != '\n') {},
            '"' | '\'' if word.is_empty() => words.push(chars.by_ref().take_while(|next| *next != c).collect()),
            ';' | '{' | '}' => {
                words.extend((!word.is_empty()).then(|| std::mem::take(&mut word)));
                all.extend((!words.is_empty()).then(|| std::mem::take(&mut words)));
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
    fn what_matters_is_found() {
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
    fn what_is_commented_out_is_not_there() {
        let served = Served::parse("http { #shunt on;\n shunt_trust none; server { listen 10.0.0.2; } }");
        assert!(!served.hands_off && !served.trusts && served.user.is_none());
        let named = |text| Served::parse(text).user;
        assert_eq!(named("user www-data;"), Some(("www-data".into(), None)));
        assert_eq!(named("user web www;"), Some(("web".into(), Some("www".into()))));
        assert_eq!(served.addresses, ["10.0.0.2:80".parse().unwrap()]);
    }
}
