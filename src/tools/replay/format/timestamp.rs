//! Parsing of times and durations in logs.

use jiff::Timestamp;
use jiff::civil::DateTime;

/// Formats of times, from the least to the most precise.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum TimestampFormat {
    /// Time of the common log format, such as `10/Oct/2000:13:55:36 -0700`.
    Local,
    /// ISO 8601 time, such as `2000-10-10T13:55:36.123-07:00`.
    Iso8601,
    /// Seconds since the Unix epoch, such as `971211336.123`.
    Unix,
}

/// The time that was parsed last. Consecutive lines usually have the same date.
#[derive(Debug, Clone, Default)]
pub(super) struct TimestampCache {
    text: Vec<u8>,
    us: u64,
}

impl TimestampCache {
    /// Parse a time. The result is in µs since the Unix epoch.
    pub(super) fn parse(&mut self, format: TimestampFormat, text: &[u8]) -> Option<u64> {
        if format == TimestampFormat::Unix {
            return parse_unix(text);
        }
        if self.text == text && !text.is_empty() {
            return Some(self.us);
        }
        let us = if format == TimestampFormat::Local { parse_local(text)? } else { parse_iso8601(text)? };
        self.text.clear();
        self.text.extend_from_slice(text);
        self.us = us;
        Some(us)
    }
}

const MONTHS: [&[u8]; 12] =
    [b"Jan", b"Feb", b"Mar", b"Apr", b"May", b"Jun", b"Jul", b"Aug", b"Sep", b"Oct", b"Nov", b"Dec"];

/// Parse a time such as `10/Oct/2000:13:55:36 -0700`. The result is in µs since the Unix epoch.
fn parse_local(text: &[u8]) -> Option<u64> {
    let [d0, d1, b'/', month @ .., b'/', _, _, _, _, b':', _, _, b':', _, _, b':', _, _, b' ', sign, _, _, _, _] = text
    else {
        return None;
    };
    let month = MONTHS.iter().position(|name| *name == month)? + 1;
    let rest = &text[text.len() - 19..];
    let (year, hour, minute, second) = (
        parse_digits(&rest[..4])?,
        parse_digits(&rest[5..7])?,
        parse_digits(&rest[8..10])?,
        parse_digits(&rest[11..13])?,
    );
    let (zone_hours, zone_minutes) =
        (parse_digits(&text[text.len() - 4..][..2])?, parse_digits(&text[text.len() - 2..])?);
    let day = parse_digits(&[*d0, *d1])?;
    // Replace second 60 with 59, because jiff rejects leap seconds.
    let second = second.min(59);
    let civil = DateTime::new(year as i16, month as i8, day as i8, hour as i8, minute as i8, second as i8, 0).ok()?;
    let utc = civil.to_zoned(jiff::tz::TimeZone::UTC).ok()?.timestamp().as_second();
    let offset = (zone_hours * 3600 + zone_minutes * 60) as i64;
    let seconds = match sign {
        b'+' => utc - offset,
        b'-' => utc + offset,
        _ => return None,
    };
    u64::try_from(seconds).ok()?.checked_mul(1_000_000)
}

/// Parse an RFC 3339 time with `T` or a space. The result is in µs since the Unix epoch.
pub(super) fn parse_iso8601(text: &[u8]) -> Option<u64> {
    let timestamp: Timestamp = std::str::from_utf8(text).ok()?.parse().ok()?;
    u64::try_from(timestamp.as_microsecond()).ok()
}

/// Parse seconds in decimal notation with an optional fraction. The result is in µs. Ignore digits after the sixth
/// digit.
pub(super) fn parse_unix(text: &[u8]) -> Option<u64> {
    let (whole, fraction) = match memchr::memchr(b'.', text) {
        Some(dot) => (&text[..dot], &text[dot + 1..]),
        None => (text, &[][..]),
    };
    let mut us = parse_digits(whole)?.checked_mul(1_000_000)?;
    let mut unit = 100_000;
    for byte in fraction {
        if !byte.is_ascii_digit() {
            return None;
        }
        us = us.checked_add(u64::from(byte - b'0') * unit)?;
        unit /= 10;
    }
    // Reject times after the year 9999.
    (us < 253_402_300_800_000_000).then_some(us)
}

/// Convert a JSON number of seconds to µs. Return `None` if the number is negative, not finite or after the year 9999.
pub(super) fn seconds_to_us(number: f64) -> Option<u64> {
    (0.0..253_402_300_800.0).contains(&number).then(|| (number * 1e6).round() as u64)
}

fn parse_digits(text: &[u8]) -> Option<u64> {
    let is_numeric = !text.is_empty() && text.len() <= 12 && text.iter().all(u8::is_ascii_digit);
    is_numeric.then(|| text.iter().fold(0, |number, digit| number * 10 + u64::from(digit - b'0')))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timestamps_parse_in_each_format() {
        let october = 971_211_336_000_000;
        for (format, text, expected) in [
            (TimestampFormat::Local, "10/Oct/2000:13:55:36 -0700", Some(october)),
            (TimestampFormat::Local, "10/Oct/2000:22:55:36 +0200", Some(october)),
            (TimestampFormat::Local, "10/Oct/2000:20:55:36 +0000", Some(october)),
            (TimestampFormat::Local, "31/Dec/2016:23:59:60 +0000", Some(1_483_228_799_000_000)),
            (TimestampFormat::Local, "29/Feb/2024:00:00:00 +0000", Some(1_709_164_800_000_000)),
            (TimestampFormat::Local, "29/Feb/2023:00:00:00 +0000", None),
            (TimestampFormat::Local, "10/Okt/2000:13:55:36 -0700", None),
            (TimestampFormat::Local, "10/Oct/2000:13:55:36", None),
            (TimestampFormat::Local, "", None),
            (TimestampFormat::Iso8601, "2000-10-10T13:55:36-07:00", Some(october)),
            (TimestampFormat::Iso8601, "2000-10-10T20:55:36.123456Z", Some(october + 123_456)),
            (TimestampFormat::Iso8601, "1960-10-10T20:55:36Z", None),
            (TimestampFormat::Iso8601, "yesterday", None),
            (TimestampFormat::Unix, "971211336", Some(october)),
            (TimestampFormat::Unix, "971211336.5", Some(october + 500_000)),
            (TimestampFormat::Unix, "971211336.1234567", Some(october + 123_456)),
            (TimestampFormat::Unix, "-1", None),
            (TimestampFormat::Unix, "99999999999999", None),
            (TimestampFormat::Unix, "9711.3.4", None),
        ] {
            let mut cache = TimestampCache::default();
            assert_eq!(cache.parse(format, text.as_bytes()), expected, "{text}");
            assert_eq!(cache.parse(format, text.as_bytes()), expected, "{text} once more");
        }
        assert_eq!(seconds_to_us(971_211_336.123_457), Some(october + 123_457));
        assert_eq!(seconds_to_us(f64::NAN), None);
        assert_eq!(seconds_to_us(-1.0), None);
    }
}
