//! Errors of TLS between agents, in words that say what to do. rustls's own texts name only the check that failed. Some
//! of them contain the present time, and so differ each time for the same cause.

use rustls::{AlertDescription, CertificateError, Error};

/// Returns one sentence for an error, always the same for the same cause.
pub fn in_words(error: &Error) -> String {
    match error {
        Error::InvalidCertificate(why) => certificate(why),
        Error::AlertReceived(alert) => refused(*alert),
        Error::NoCertificatesPresented => "it shows no certificate: check that it is an agent".into(),
        Error::NoApplicationProtocol => {
            "it does not speak Shunt's protocol (ALPN shunt/1): check that it is an agent".into()
        }
        Error::InvalidMessage(_) => format!("it does not speak TLS ({error}): check that it is an agent"),
        error => error.to_string(),
    }
}

/// Says what is wrong with the peer's certificate.
fn certificate(error: &CertificateError) -> String {
    use CertificateError as E;
    match error {
        E::Expired | E::ExpiredContext { .. } => "its certificate has expired: issue another".into(),
        E::NotValidYet | E::NotValidYetContext { .. } => {
            "its certificate is not valid yet: compare the clocks of both machines and of the authority".into()
        }
        // `BadSignature`: an authority with the same name, but another key.
        E::UnknownIssuer | E::BadSignature => {
            "its certificate is from another authority than `ca` of [tls] here: use one authority for both".into()
        }
        E::Revoked => "its certificate is revoked: issue another".into(),
        E::NotValidForName | E::NotValidForNameContext { .. } => {
            "its certificate has another name than its [[peer]] here: check that `address` leads to the right machine"
                .into()
        }
        E::ExpiredRevocationList | E::ExpiredRevocationListContext { .. } => {
            "the list of revoked certificates (`crl` of [tls]) is too old: fetch a newer one".into()
        }
        error => format!("its certificate is not valid: {error}"),
    }
}

/// Says why the peer refuses this agent's certificate or connection.
fn refused(alert: AlertDescription) -> String {
    use AlertDescription as A;
    match alert {
        A::CertificateExpired => {
            "it refuses our certificate, which has expired there: issue another, or compare the clocks of both \
             machines"
                .into()
        }
        A::CertificateRevoked => "it refuses our certificate, because it is revoked: issue another".into(),
        A::UnknownCA | A::DecryptError => {
            "it refuses our certificate, because its `ca` is another authority: use one authority for both".into()
        }
        alert => format!("it refuses our connection ({alert:?}): see its log"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustls::pki_types::UnixTime;
    use std::time::Duration;

    #[test]
    fn the_same_trouble_is_the_same_text_whenever_it_is_seen() {
        let at = |seconds| UnixTime::since_unix_epoch(Duration::from_secs(seconds));
        let expired = |time| {
            let not_after = at(10);
            in_words(&Error::InvalidCertificate(CertificateError::ExpiredContext { time: at(time), not_after }))
        };
        assert_eq!(expired(20), expired(30));
        assert!(expired(20).contains("expired"), "{}", expired(20));
    }

    #[test]
    fn an_authority_is_named_whichever_check_finds_it_wrong() {
        for error in [CertificateError::UnknownIssuer, CertificateError::BadSignature] {
            assert!(in_words(&Error::InvalidCertificate(error)).contains("authority"));
        }
        for alert in [AlertDescription::UnknownCA, AlertDescription::DecryptError] {
            assert!(in_words(&Error::AlertReceived(alert)).contains("authority"));
        }
    }
}
