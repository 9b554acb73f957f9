//! Content type of a message, as far as its first bytes show it. HTTP/1 and FastCGI write the type in the same form.
//! The type serves only to guess which payloads (bodies that programs write) are alike ([`crate::learnt`]), so no other
//! part of the message is parsed.

/// Number of bytes at the start of a message that are searched for the type.
pub const LOOK_BYTES: usize = 1024;
const NAME: &[u8] = b"content-type";
/// Longest type that is recognised, in bytes.
const TYPE_BYTES: usize = 64;

/// Returns the type and subtype as they are written. `None`: these bytes have no content type, only a part of one, or
/// one that is too long.
#[must_use]
pub fn content_type(message: &[u8]) -> Option<&[u8]> {
    let message = &message[..message.len().min(LOOK_BYTES)];
    memchr::memchr_iter(b':', message).find_map(|colon| {
        let from = colon.checked_sub(NAME.len())?;
        let (before, name) = message[..colon].split_at(from);
        let is_whole = before.last().is_none_or(|byte| !byte.is_ascii_alphanumeric() && *byte != b'-');
        if !is_whole || !name.eq_ignore_ascii_case(NAME) {
            return None;
        }
        let value = message[colon + 1..].trim_ascii_start();
        let end = value.iter().take(TYPE_BYTES + 1).position(|byte| *byte <= b' ' || *byte == b';' || *byte >= 0x7f)?;
        (end > 0).then(|| &value[..end])
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn it_is_found_in_the_words_of_http_and_fastcgi() {
        let cases: [(&[u8], Option<&[u8]>); 9] = [
            (b"HTTP/1.1 200 OK\r\nContent-Type: text/html; charset=utf-8\r\n\r\n", Some(b"text/html")),
            (b"HTTP/1.1 200 OK\r\ncontent-type:image/png\r\n\r\n", Some(b"image/png")),
            (b"\x01\x06\x00\x01\x00\x40\x00\x00Content-type: text/plain\r\n\r\nbody", Some(b"text/plain")),
            (b"POST / HTTP/1.1\r\nHost: a:1\r\nCONTENT-TYPE:  a/b\r\n", Some(b"a/b")),
            (b"HTTP/1.1 200 OK\r\nX-Content-Type: text/html\r\n\r\n", None),
            (b"HTTP/1.1 200 OK\r\nContent-Type: text/ht", None),
            (b"HTTP/1.1 200 OK\r\nContent-Type:\r\n\r\n", None),
            (b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n:", None),
            (b"", None),
        ];
        for (message, expected) in cases {
            assert_eq!(content_type(message), expected, "{}", message.escape_ascii());
        }
        let late = [&[b'x'; LOOK_BYTES][..], b"\r\nContent-Type: text/html\r\n"].concat();
        assert_eq!(content_type(&late), None);
    }

    proptest! {
        #[test]
        fn whatever_a_message_is(bytes in proptest::collection::vec(any::<u8>(), 0..2000)) {
            prop_assert!(content_type(&bytes).is_none_or(|found| !found.is_empty() && found.len() <= TYPE_BYTES));
        }

        #[test]
        fn it_is_found_behind_any_others(
            before in "([a-z]{1,20}: [ -~]{0,40}\r\n){0,6}", kind in "[a-z]{1,10}/[a-z0-9.+-]{1,20}",
        ) {
            prop_assume!(!before.contains("content-type"));
            let message = format!("{before}Content-Type: {kind}\r\n\r\n");
            prop_assert_eq!(content_type(message.as_bytes()), Some(kind.as_bytes()));
        }
    }
}
