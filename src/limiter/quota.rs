//! Quotas of the form `COUNT/UNIT`, and calendar windows.

use std::fmt;
use std::str::FromStr;
use std::sync::{Mutex, PoisonError};

use jiff::civil::Date;
use jiff::tz::TimeZone;
use jiff::{Timestamp, ToSpan};

/// A quota: `count` tokens per window. `600/min` means 600 tokens in 60,000,000 µs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Quota {
    /// Tokens per window, at least 1.
    pub count: u64,
    /// Length of the window, µs. `None` for months and years, which have no fixed length, and for concurrency limits.
    pub window_us: Option<u64>,
    /// The calendar unit of the quota, if it has one.
    pub calendar: Option<CalendarUnit>,
}

/// Units of time. With the algorithm `fixed-window`, the windows of these units follow the calendar.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CalendarUnit {
    /// A calendar day, from midnight to midnight.
    Day,
    /// A calendar week, from Monday to Sunday (ISO 8601).
    Week,
    /// A calendar month.
    Month,
    /// A calendar year.
    Year,
}

/// The reason why a quota is invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum QuotaError {
    /// This text does not have the form `COUNT/UNIT`.
    #[error("`{0}` is not a quota")]
    Syntax(String),
    /// The count, which has this text, is not a positive integer.
    #[error("`{0}` is not a whole number of at least 1")]
    Count(String),
    /// The unit, which has this text, is neither a unit of time nor a duration.
    #[error("`{0}` is not a unit of time")]
    Unit(String),
    /// The parameter with this name is 0.
    #[error("a {0} of zero would deny every request")]
    Zero(&'static str),
    /// The algorithm would need integers of 2^53 or more. Redis' Lua cannot represent all of them exactly.
    #[error("a quota of {count} cannot be counted exactly with this algorithm: intermediate products would reach 2^53")]
    Inexact {
        /// Tokens per window.
        count: u64,
    },
    /// A sliding log stores one timestamp for each token, and the quota has too many tokens.
    #[error("a sliding log has at most {max} entries, but the quota has {count}")]
    LongLog {
        /// Tokens per window.
        count: u64,
        /// Maximum number of tokens.
        max: u64,
    },
    /// The length of the window in µs is not a multiple of the number of sliding buckets.
    #[error("the window cannot be divided into {buckets} parts of whole microseconds")]
    Buckets {
        /// Number of buckets.
        buckets: u64,
    },
    /// The algorithm requires a window of fixed length, but the quota is per month or year.
    #[error("quotas per month and year are valid only for fixed-window, because months and years have no fixed length")]
    NoFixedWindow,
    /// Together with the other limits of a route, a check of a sliding log with this many entries would occupy the store
    /// for too long.
    #[error("a sliding log of {count} entries would occupy the store for too long on a route with several limits")]
    Weight {
        /// Tokens per window.
        count: u64,
    },
    /// `prefetch` exceeds the capacity of a variant.
    #[error("a prefetch of {prefetch} tokens exceeds the capacity of {capacity}")]
    Prefetch {
        /// Maximum number of prefetched tokens.
        prefetch: u64,
        /// Capacity of the variant.
        capacity: u64,
    },
    /// The IANA time zone database has no zone with this name.
    #[error("there is no time zone `{0}`")]
    TimeZone(String),
}

const SECOND_US: u64 = 1_000_000;

/// Minimum length of a calendar month and of a calendar year, µs.
const SHORTEST_MONTH_US: u64 = 28 * 86_400 * SECOND_US;
const SHORTEST_YEAR_US: u64 = 365 * 86_400 * SECOND_US;

/// Integers below this bound are exact in Redis' Lua, which calculates with doubles. Doubles cannot represent all
/// integers above 2^53.
pub const EXACT_INTEGER_LIMIT: u64 = 1 << 53;

impl Quota {
    /// Parse a quota of a concurrency limit: a number of requests in flight.
    ///
    /// # Errors
    /// The text is not a count.
    pub fn parse_concurrency(text: &str) -> Result<Self, QuotaError> {
        Ok(Quota { count: parse_count(text.trim())?, window_us: None, calendar: None })
    }

    /// Return the length of the window in µs. For months and years, return their minimum length. The quota of a
    /// concurrency limit has no window, and the result is meaningless.
    pub(crate) fn shortest_window_us(&self) -> u64 {
        match (self.window_us, self.calendar) {
            (Some(us), _) => us,
            (None, Some(CalendarUnit::Year)) => SHORTEST_YEAR_US,
            (None, _) => SHORTEST_MONTH_US,
        }
    }
}

/// Names of each time unit in other programs, the same unit in a quota, and the same unit in a duration such as `15m`.
/// The unit in a duration is `None` if durations do not support it.
const FOREIGN_UNITS: [(&[&str], &str, Option<&str>); 7] = [
    (&["s", "sec", "secs", "second", "seconds"], "s", Some("s")),
    (&["m", "min", "mins", "minute", "minutes"], "min", Some("m")),
    (&["h", "hr", "hrs", "hour", "hours"], "hour", Some("h")),
    (&["d", "day", "days"], "day", Some("d")),
    (&["w", "week", "weeks"], "week", None),
    (&["month", "months"], "month", None),
    (&["y", "yr", "year", "years"], "year", None),
];

/// For each unit, the next longer unit and the factor between them. A quota with a fraction of a token is converted to
/// the longer unit.
const LONGER_UNITS: [(&str, &str, u64); 3] = [("s", "min", 60), ("min", "hour", 60), ("hour", "day", 24)];

impl Quota {
    /// Return the quota that an invalid text probably means. The function understands the forms of other programs, such
    /// as `10r/s`, `10 per minute` and `10/minute`, and fractions such as `0.5/s`.
    pub fn suggestion(text: &str) -> Option<String> {
        let text = text.trim().to_ascii_lowercase();
        let split = text.find(|c: char| !c.is_ascii_digit() && !matches!(c, '.' | '_')).unwrap_or(text.len());
        let (count, rest) = text.split_at(split);
        let rest = rest.trim_start();
        let rest =
            ["requests", "request", "reqs", "req", "r"].iter().find_map(|word| rest.strip_prefix(word)).unwrap_or(rest);
        let rest = rest.trim_start();
        let unit = match rest {
            "ps" => "s",
            "pm" => "m",
            "ph" => "h",
            _ => ["/", "per ", "every "].iter().find_map(|word| rest.strip_prefix(word))?.trim(),
        };
        let digits = unit.find(|c: char| !c.is_ascii_digit())?;
        let (length, unit) = unit.split_at(digits);
        let unit = unit.trim();
        let (_, mut unit, letter) = FOREIGN_UNITS.into_iter().find(|(names, ..)| names.contains(&unit))?;
        let (whole, decimals) = count.split_once('.').unwrap_or((count, ""));
        let mut digits: u64 = format!("{whole}{decimals}").replace('_', "").parse().ok()?;
        let scale = 10_u64.checked_pow(decimals.len().try_into().ok()?)?;
        while !digits.is_multiple_of(scale) && matches!(length, "" | "1") {
            let (_, longer, factor) = LONGER_UNITS.into_iter().find(|(shorter, ..)| *shorter == unit)?;
            unit = longer;
            digits = digits.checked_mul(factor)?;
        }
        let count = digits.is_multiple_of(scale).then_some(digits / scale)?;
        let quota = match length {
            "" | "1" => format!("{count}/{unit}"),
            length => format!("{count}/{length}{}", letter?),
        };
        quota.parse::<Quota>().ok().map(|_| quota)
    }
}

impl FromStr for Quota {
    type Err = QuotaError;

    fn from_str(text: &str) -> Result<Self, QuotaError> {
        let (count, unit) = text.split_once('/').ok_or_else(|| QuotaError::Syntax(text.to_owned()))?;
        let count = parse_count(count.trim())?;
        let unit = unit.trim();
        let (window, calendar) = match unit {
            "s" => (Some(SECOND_US), None),
            "min" => (Some(60 * SECOND_US), None),
            "hour" => (Some(3600 * SECOND_US), None),
            "day" => (Some(86_400 * SECOND_US), Some(CalendarUnit::Day)),
            "week" => (Some(7 * 86_400 * SECOND_US), Some(CalendarUnit::Week)),
            "month" => (None, Some(CalendarUnit::Month)),
            "year" => (None, Some(CalendarUnit::Year)),
            _ => (Some(parse_duration_us(unit).ok_or_else(|| QuotaError::Unit(unit.to_owned()))?), None),
        };
        Ok(Quota { count, window_us: window, calendar })
    }
}

/// Write the quota in the syntax of the configuration: `600/min` or `5/15m`, and `20` for a concurrency limit.
impl fmt::Display for Quota {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.count)?;
        match (self.calendar, self.window_us) {
            (Some(CalendarUnit::Day), _) => f.write_str("/day"),
            (Some(CalendarUnit::Week), _) => f.write_str("/week"),
            (Some(CalendarUnit::Month), _) => f.write_str("/month"),
            (Some(CalendarUnit::Year), _) => f.write_str("/year"),
            (None, None) => Ok(()),
            (None, Some(SECOND_US)) => f.write_str("/s"),
            (None, Some(us)) if us == 60 * SECOND_US => f.write_str("/min"),
            (None, Some(us)) if us == 3600 * SECOND_US => f.write_str("/hour"),
            (None, Some(us)) => {
                let units =
                    [("d", 86_400 * SECOND_US), ("h", 3600 * SECOND_US), ("m", 60 * SECOND_US), ("s", SECOND_US)];
                let whole = units.into_iter().find(|(_, unit)| us.is_multiple_of(*unit)).unwrap_or(("ms", 1000));
                write!(f, "/{}{}", us / whole.1, whole.0)
            }
        }
    }
}

/// Parse a count that is written as an integer or as `1e6`. Digits may be grouped with `_`.
fn parse_count(text: &str) -> Result<u64, QuotaError> {
    let error = || QuotaError::Count(text.to_owned());
    let digits = text.replace('_', "");
    let count = match digits.split_once(['e', 'E']) {
        Some((base, exponent)) => {
            let exponent = exponent.parse().map_err(|_| error())?;
            let power = 10u64.checked_pow(exponent).ok_or_else(error)?;
            base.parse::<u64>().ok().and_then(|base| base.checked_mul(power)).ok_or_else(error)?
        }
        None => digits.parse().map_err(|_| error())?,
    };
    if count == 0 {
        return Err(QuotaError::Zero("quota"));
    }
    if count >= EXACT_INTEGER_LIMIT {
        return Err(QuotaError::Inexact { count });
    }
    Ok(count)
}

/// Parse a duration such as `250ms`, `5s`, `15m`, `1h` or `1d`. Return it in µs, or `None` if the text is not a
/// duration, is zero, or exceeds 3650 days.
pub fn parse_duration_us(text: &str) -> Option<u64> {
    let split = text.find(|c: char| !c.is_ascii_digit())?;
    let (count, unit) = text.split_at(split);
    let unit_us = match unit {
        "ms" => 1_000,
        "s" => SECOND_US,
        "m" => 60 * SECOND_US,
        "h" => 3600 * SECOND_US,
        "d" => 86_400 * SECOND_US,
        _ => return None,
    };
    let us = count.parse::<u64>().ok()?.checked_mul(unit_us)?;
    (1..=3650 * 86_400 * SECOND_US).contains(&us).then_some(us)
}

// === Calendar windows: days, weeks, months and years in a time zone ===

/// Windows of a calendar unit in a time zone, with a cache of the last computed boundaries.
#[derive(Debug)]
pub struct CalendarWindows {
    unit: CalendarUnit,
    zone: TimeZone,
    cached: Mutex<[u64; 3]>,
}

impl CalendarWindows {
    /// Create the windows of a unit in a zone of the IANA time zone database.
    ///
    /// # Errors
    /// The database has no such zone.
    pub fn new(unit: CalendarUnit, zone: &str) -> Result<Self, jiff::Error> {
        Ok(CalendarWindows { unit, zone: TimeZone::get(zone)?, cached: Mutex::new([0; 3]) })
    }

    /// Return windows of another unit in the same zone.
    pub fn with_unit(&self, unit: CalendarUnit) -> Self {
        CalendarWindows { unit, zone: self.zone.clone(), cached: Mutex::new([0; 3]) }
    }

    /// Return the boundaries of the window that contains `now_us`: its start, the start of the next window, and the
    /// start of the window after that, in µs since the Unix epoch. Two windows are returned, so that a store whose
    /// clock is slightly ahead also finds its current window.
    pub fn boundaries_around(&self, now_us: u64) -> [u64; 3] {
        let mut cached = self.cached.lock().unwrap_or_else(PoisonError::into_inner);
        if !(cached[0] <= now_us && now_us < cached[1]) {
            *cached = self.compute(now_us);
        }
        *cached
    }

    fn compute(&self, now_us: u64) -> [u64; 3] {
        let now = Timestamp::from_microsecond(now_us as i64).unwrap_or(Timestamp::UNIX_EPOCH);
        let today = self.zone.to_datetime(now).date();
        let first = self.first_day(today);
        let second = self.first_day(first.saturating_add(self.unit_span()));
        let third = self.first_day(second.saturating_add(self.unit_span()));
        [first, second, third].map(|day| start_of_day_us(day, &self.zone))
    }

    /// Return the first day of the window that contains a day. Weeks start on Monday (ISO 8601).
    fn first_day(&self, day: Date) -> Date {
        match self.unit {
            CalendarUnit::Day => day,
            CalendarUnit::Week => day.saturating_sub(i64::from(day.weekday().to_monday_zero_offset()).days()),
            CalendarUnit::Month => day.first_of_month(),
            CalendarUnit::Year => day.first_of_year(),
        }
    }

    fn unit_span(&self) -> jiff::Span {
        match self.unit {
            CalendarUnit::Day => 1.day(),
            CalendarUnit::Week => 1.week(),
            CalendarUnit::Month => 1.month(),
            CalendarUnit::Year => 1.year(),
        }
    }
}

/// Return the start of a day in µs since the Unix epoch: midnight, or the first instant after it if a clock change
/// skips midnight.
pub fn start_of_day_us(day: Date, zone: &TimeZone) -> u64 {
    let start = day.to_zoned(zone.clone()).map(|zoned| zoned.timestamp().as_microsecond());
    start.ok().and_then(|us| u64::try_from(us).ok()).unwrap_or(0)
}

impl PartialEq for CalendarWindows {
    fn eq(&self, other: &Self) -> bool {
        self.unit == other.unit && self.zone == other.zone
    }
}

impl Eq for CalendarWindows {}

impl fmt::Display for CalendarWindows {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let unit = match self.unit {
            CalendarUnit::Day => "day",
            CalendarUnit::Week => "week",
            CalendarUnit::Month => "month",
            CalendarUnit::Year => "year",
        };
        write!(f, "{unit}@{}", self.zone.iana_name().unwrap_or("UTC"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quotas_parse() {
        for (text, count, window) in [
            ("600/min", 600, Some(60_000_000)),
            ("5/15m", 5, Some(900_000_000)),
            ("1e6/hour", 1_000_000, Some(3_600_000_000)),
            ("10 / 250ms", 10, Some(250_000)),
            ("7/week", 7, Some(604_800_000_000)),
            ("1/month", 1, None),
        ] {
            let quota: Quota = text.parse().unwrap();
            assert_eq!((quota.count, quota.window_us), (count, window), "{text}");
            assert_eq!(quota.to_string().parse(), Ok(quota), "{text} is written as {quota}");
        }
    }

    #[test]
    fn quota_display_round_trips() {
        for text in ["600/min", "5/15m", "1/s", "10/250ms", "7/week", "1/month", "3/hour", "2/30d", "4/90s", "1/day"] {
            assert_eq!(text.parse::<Quota>().unwrap().to_string(), text);
        }
        assert_eq!(Quota::parse_concurrency("20").unwrap().to_string(), "20");
        assert_eq!("1/60s".parse::<Quota>().unwrap().to_string(), "1/min");
    }

    #[test]
    fn foreign_quotas_have_a_suggestion() {
        for (text, expected) in [
            ("10/minute", Some("10/min")),
            ("10 per second", Some("10/s")),
            ("10r/s", Some("10/s")),
            ("10r/m", Some("10/min")),
            ("100rps", Some("100/s")),
            ("100 rpm", Some("100/min")),
            ("5 requests per 15 minutes", Some("5/15m")),
            ("1_000 req/hr", Some("1000/hour")),
            ("0.5/s", Some("30/min")),
            ("1.5/min", Some("90/hour")),
            // `0.001/s` is 86.4 per day, which is not an integer.
            ("0.001/s", None),
            ("1.5/week", None),
            ("1/fortnight", None),
            ("10", None),
            ("-1/min", None),
            ("0/s", None),
            ("", None),
        ] {
            assert_eq!(Quota::suggestion(text).as_deref(), expected, "{text}");
        }
    }

    #[test]
    fn invalid_quotas_are_rejected() {
        for text in
            ["600", "0/min", "-1/min", "1.5/min", "1/fortnight", "1/0s", "9007199254740992/s", "1e99/s", "/s", "1/"]
        {
            assert!(text.parse::<Quota>().is_err(), "{text} must be rejected");
        }
    }
}

#[cfg(test)]
mod calendar_tests {
    use super::*;

    fn micros(text: &str) -> u64 {
        text.parse::<Timestamp>().unwrap().as_microsecond() as u64
    }

    #[test]
    fn calendar_windows_follow_the_time_zone() {
        for (unit, zone, now, expected) in [
            (
                CalendarUnit::Day,
                "UTC",
                "2026-11-21T12:00:00Z",
                ["2026-11-21T00:00:00Z", "2026-11-22T00:00:00Z", "2026-11-23T00:00:00Z"],
            ),
            // In Berlin, the day of the next case has 23 hours, and the day of the case after it has 25 hours.
            (
                CalendarUnit::Day,
                "Europe/Berlin",
                "2026-03-29T10:00:00Z",
                ["2026-03-28T23:00:00Z", "2026-03-29T22:00:00Z", "2026-03-30T22:00:00Z"],
            ),
            (
                CalendarUnit::Day,
                "Europe/Berlin",
                "2026-10-25T10:00:00Z",
                ["2026-10-24T22:00:00Z", "2026-10-25T23:00:00Z", "2026-10-26T23:00:00Z"],
            ),
            // Midnight does not exist on this day, which starts at one o'clock.
            (
                CalendarUnit::Day,
                "Africa/Cairo",
                "2026-04-24T12:00:00Z",
                ["2026-04-23T22:00:00Z", "2026-04-24T21:00:00Z", "2026-04-25T21:00:00Z"],
            ),
            // A Saturday belongs to the week that started on Monday.
            (
                CalendarUnit::Week,
                "UTC",
                "2026-11-21T12:00:00Z",
                ["2026-11-16T00:00:00Z", "2026-11-23T00:00:00Z", "2026-11-30T00:00:00Z"],
            ),
            (
                CalendarUnit::Month,
                "UTC",
                "2026-01-31T23:59:59Z",
                ["2026-01-01T00:00:00Z", "2026-02-01T00:00:00Z", "2026-03-01T00:00:00Z"],
            ),
            (
                CalendarUnit::Month,
                "Europe/Berlin",
                "2026-02-28T23:30:00Z",
                ["2026-02-28T23:00:00Z", "2026-03-31T22:00:00Z", "2026-04-30T22:00:00Z"],
            ),
            (
                CalendarUnit::Year,
                "Asia/Tokyo",
                "2026-12-31T15:00:00Z",
                ["2026-12-31T15:00:00Z", "2027-12-31T15:00:00Z", "2028-12-31T15:00:00Z"],
            ),
        ] {
            let windows = CalendarWindows::new(unit, zone).unwrap();
            assert_eq!(windows.boundaries_around(micros(now)), expected.map(micros), "{unit:?} in {zone} at {now}");
        }
        assert!(CalendarWindows::new(CalendarUnit::Day, "Mars/Olympus").is_err());
    }

    #[test]
    fn cached_boundaries_end_with_their_window() {
        let windows = CalendarWindows::new(CalendarUnit::Day, "UTC").unwrap();
        let first = windows.boundaries_around(micros("2026-11-21T23:59:59Z"));
        let second = windows.boundaries_around(micros("2026-11-22T00:00:00Z"));
        assert_eq!((first[1], first[2]), (second[0], second[1]));
    }
}
