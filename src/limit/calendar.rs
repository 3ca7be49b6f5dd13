//! Calendar windows: days, weeks, months and years as a time zone has them.

use std::fmt;
use std::sync::{Mutex, PoisonError};

use jiff::civil::Date;
use jiff::tz::TimeZone;
use jiff::{Timestamp, ToSpan};

use super::quota::Calendar;

/// A unit of the calendar in a time zone, with the boundaries that were computed last.
#[derive(Debug)]
pub struct Windows {
    unit: Calendar,
    zone: TimeZone,
    known: Mutex<[u64; 3]>,
}

impl Windows {
    /// Windows of a unit in a zone of the IANA database.
    ///
    /// # Errors
    /// The database has no such zone.
    pub fn new(unit: Calendar, zone: &str) -> Result<Self, jiff::Error> {
        Ok(Windows { unit, zone: TimeZone::get(zone)?, known: Mutex::new([0; 3]) })
    }

    /// Windows of another unit in the same zone.
    pub fn by(&self, unit: Calendar) -> Self {
        Windows { unit, zone: self.zone.clone(), known: Mutex::new([0; 3]) }
    }

    /// The window around an instant: its start, the start of the next one and of the one after that, in µs since the Unix
    /// epoch. A clock that is not far off finds its window in them as well.
    pub fn around(&self, now_us: u64) -> [u64; 3] {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if !(known[0] <= now_us && now_us < known[1]) {
            *known = self.compute(now_us);
        }
        *known
    }

    fn compute(&self, now_us: u64) -> [u64; 3] {
        let now = Timestamp::from_microsecond(now_us as i64).unwrap_or(Timestamp::UNIX_EPOCH);
        let today = self.zone.to_datetime(now).date();
        let first = self.first_day(today);
        let second = self.first_day(first.saturating_add(self.step()));
        let third = self.first_day(second.saturating_add(self.step()));
        [first, second, third].map(|day| self.start_us(day))
    }

    /// The first day of the window that a day belongs to; a week starts on Monday (ISO 8601).
    fn first_day(&self, day: Date) -> Date {
        match self.unit {
            Calendar::Day => day,
            Calendar::Week => day.saturating_sub(i64::from(day.weekday().to_monday_zero_offset()).days()),
            Calendar::Month => day.first_of_month(),
            Calendar::Year => day.first_of_year(),
        }
    }

    fn step(&self) -> jiff::Span {
        match self.unit {
            Calendar::Day => 1.day(),
            Calendar::Week => 1.week(),
            Calendar::Month => 1.month(),
            Calendar::Year => 1.year(),
        }
    }

    /// When a day starts: at midnight, or where a change of the clock leaves midnight out, right after it.
    fn start_us(&self, day: Date) -> u64 {
        let start = day.to_zoned(self.zone.clone()).map(|zoned| zoned.timestamp().as_microsecond());
        start.ok().and_then(|us| u64::try_from(us).ok()).unwrap_or(0)
    }
}

impl PartialEq for Windows {
    fn eq(&self, other: &Self) -> bool {
        self.unit == other.unit && self.zone == other.zone
    }
}

impl Eq for Windows {}

impl fmt::Display for Windows {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let unit = match self.unit {
            Calendar::Day => "day",
            Calendar::Week => "week",
            Calendar::Month => "month",
            Calendar::Year => "year",
        };
        write!(f, "{unit}@{}", self.zone.iana_name().unwrap_or("UTC"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn us(text: &str) -> u64 {
        text.parse::<Timestamp>().unwrap().as_microsecond() as u64
    }

    #[test]
    fn windows_follow_the_calendar_of_the_zone() {
        for (unit, zone, now, expected) in [
            (
                Calendar::Day,
                "UTC",
                "2026-11-21T12:00:00Z",
                ["2026-11-21T00:00:00Z", "2026-11-22T00:00:00Z", "2026-11-23T00:00:00Z"],
            ),
            // A day of 23 hours, and one of 25.
            (
                Calendar::Day,
                "Europe/Berlin",
                "2026-03-29T10:00:00Z",
                ["2026-03-28T23:00:00Z", "2026-03-29T22:00:00Z", "2026-03-30T22:00:00Z"],
            ),
            (
                Calendar::Day,
                "Europe/Berlin",
                "2026-10-25T10:00:00Z",
                ["2026-10-24T22:00:00Z", "2026-10-25T23:00:00Z", "2026-10-26T23:00:00Z"],
            ),
            // Midnight does not exist on this day: it starts at one.
            (
                Calendar::Day,
                "Africa/Cairo",
                "2026-04-24T12:00:00Z",
                ["2026-04-23T22:00:00Z", "2026-04-24T21:00:00Z", "2026-04-25T21:00:00Z"],
            ),
            // A Saturday belongs to the week that started on Monday.
            (
                Calendar::Week,
                "UTC",
                "2026-11-21T12:00:00Z",
                ["2026-11-16T00:00:00Z", "2026-11-23T00:00:00Z", "2026-11-30T00:00:00Z"],
            ),
            (
                Calendar::Month,
                "UTC",
                "2026-01-31T23:59:59Z",
                ["2026-01-01T00:00:00Z", "2026-02-01T00:00:00Z", "2026-03-01T00:00:00Z"],
            ),
            (
                Calendar::Month,
                "Europe/Berlin",
                "2026-02-28T23:30:00Z",
                ["2026-02-28T23:00:00Z", "2026-03-31T22:00:00Z", "2026-04-30T22:00:00Z"],
            ),
            (
                Calendar::Year,
                "Asia/Tokyo",
                "2026-12-31T15:00:00Z",
                ["2026-12-31T15:00:00Z", "2027-12-31T15:00:00Z", "2028-12-31T15:00:00Z"],
            ),
        ] {
            let windows = Windows::new(unit, zone).unwrap();
            assert_eq!(windows.around(us(now)), expected.map(us), "{unit:?} in {zone} at {now}");
        }
        assert!(Windows::new(Calendar::Day, "Mars/Olympus").is_err());
    }

    #[test]
    fn what_is_known_is_not_used_beyond_its_window() {
        let windows = Windows::new(Calendar::Day, "UTC").unwrap();
        let first = windows.around(us("2026-11-21T23:59:59Z"));
        let second = windows.around(us("2026-11-22T00:00:00Z"));
        assert_eq!((first[1], first[2]), (second[0], second[1]));
    }
}
