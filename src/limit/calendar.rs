//! Calendar windows: days, weeks, months and years as a time zone has them.

use std::fmt;
use std::sync::{Mutex, PoisonError};

use jiff::civil::Date;
use jiff::tz::TimeZone;
use jiff::{Timestamp, ToSpan};

use super::quota::CalendarUnit;

/// A unit of the calendar in a time zone, with the boundaries that were computed last.
#[derive(Debug)]
pub struct CalendarWindows {
    unit: CalendarUnit,
    zone: TimeZone,
    cached: Mutex<[u64; 3]>,
}

impl CalendarWindows {
    /// Windows of a unit in a zone of the IANA database.
    ///
    /// # Errors
    /// The database has no such zone.
    pub fn new(unit: CalendarUnit, zone: &str) -> Result<Self, jiff::Error> {
        Ok(CalendarWindows { unit, zone: TimeZone::get(zone)?, cached: Mutex::new([0; 3]) })
    }

    /// Windows of another unit in the same zone.
    pub fn with_unit(&self, unit: CalendarUnit) -> Self {
        CalendarWindows { unit, zone: self.zone.clone(), cached: Mutex::new([0; 3]) }
    }

    /// The window around an instant: its start, the start of the next one and of the one after that, in µs since the Unix
    /// epoch. A clock that is not far off finds its window in them as well.
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
        [first, second, third].map(|day| self.start_us(day))
    }

    /// The first day of the window that a day belongs to; a week starts on Monday (ISO 8601).
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

    /// When a day starts: at midnight, or where a change of the clock leaves midnight out, right after it.
    fn start_us(&self, day: Date) -> u64 {
        let start = day.to_zoned(self.zone.clone()).map(|zoned| zoned.timestamp().as_microsecond());
        start.ok().and_then(|us| u64::try_from(us).ok()).unwrap_or(0)
    }
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
            // A day of 23 hours, and one of 25.
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
            // Midnight does not exist on this day: it starts at one.
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
