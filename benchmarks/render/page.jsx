// Draws one dashboard as Grafana does, with Grafana's own panel components, from the dashboard's JSON and what Prometheus
// answered. window.draw({dashboard, answers, from, to}) resolves once all is drawn; answers[panel id] has one for each target.
import '@fontsource/inter/400.css';
import '@fontsource/inter/500.css';
import 'uplot/dist/uPlot.min.css';
import React from 'react';
import { createRoot } from 'react-dom/client';
import {
  FieldType, MutableDataFrame, Registry, ThemeContext, applyFieldOverrides, createTheme, dateTime, getFieldDisplayValues,
  standardEditorsRegistry, standardTransformers, standardTransformersRegistry, transformDataFrame,
} from '@grafana/data';
import {
  BigValue, GlobalStyles, PanelChrome, Table, TimeSeries, VizRepeater,
} from '@grafana/ui';

const COLUMN = 66, ROW = 34, GAP = 8, PADDING = 16, NARROW = 769; // below NARROW pixels Grafana puts panels under one another
const theme = createTheme({ colors: { mode: 'light' } });
const replaceVariables = (text) => text;
const CUSTOM = ['drawStyle', 'lineWidth', 'fillOpacity', 'lineInterpolation', 'lineStyle', 'showPoints', 'spanNulls', 'stacking', 'axisSoftMin', 'axisSoftMax'];
const STANDARD = ['unit', 'min', 'max', 'decimals', 'displayName', 'noValue', 'color', 'thresholds', 'mappings', 'links'];
const item = (id, path, isCustom) => ({
  id, path, name: id, isCustom, process: (value) => value, shouldApply: () => true, editor: () => null, override: () => null, settings: {},
});
const registry = new Registry(() => [
  ...STANDARD.map((path) => item(path, path, false)), ...CUSTOM.map((path) => item(`custom.${path}`, path, true)),
]);

standardEditorsRegistry.setInit(() => []);
standardTransformersRegistry.setInit(() => [
  { id: 'organize', name: 'organize', transformation: standardTransformers.organizeFieldsTransformer, editor: () => null },
]);

const legendOf = (format, labels) => format.replace(/\{\{\s*(\w+)\s*\}\}/g, (_, name) => labels[name] ?? '').trim();

function seriesFrames(target, answer) {
  return answer.map((series) => {
    const points = series.values ?? [series.value];
    const frame = new MutableDataFrame({
      refId: target.refId,
      fields: [
        { name: 'Time', type: FieldType.time, values: points.map(([at]) => at * 1000) },
        { name: 'Value', type: FieldType.number, values: points.map(([, value]) => Number(value)), labels: series.metric },
      ],
    });
    const legend = legendOf(target.legendFormat, series.metric);
    if (legend) frame.fields[1].config = { displayNameFromDS: legend };
    return frame;
  });
}

function tableFrame(target, answer) {
  const names = [...new Set(answer.flatMap((series) => Object.keys(series.metric)))].sort();
  return [
    new MutableDataFrame({
      refId: target.refId,
      fields: [
        { name: 'Time', type: FieldType.time, values: answer.map((series) => series.value[0] * 1000) },
        ...names.map((name) => ({ name, type: FieldType.string, values: answer.map((series) => series.metric[name] ?? '') })),
        { name: 'Value', type: FieldType.number, values: answer.map((series) => Number(series.value[1])) },
      ],
    }),
  ];
}

async function framesOf(panel, answers) {
  const made = panel.type === 'table' ? tableFrame : seriesFrames;
  let frames = panel.targets.flatMap((target, i) => made(target, answers[i]));
  if (panel.transformations) {
    frames = await new Promise((resolve) => transformDataFrame(panel.transformations, frames).subscribe(resolve));
  }
  return applyFieldOverrides({ data: frames, fieldConfig: panel.fieldConfig, fieldConfigRegistry: registry, replaceVariables, theme, timeZone: 'utc' });
}

function displayed(panel, frames) {
  return getFieldDisplayValues({
    data: frames, fieldConfig: panel.fieldConfig, reduceOptions: panel.options.reduceOptions, replaceVariables, theme, timeZone: 'utc',
  });
}

function Content({ panel, frames, range, width, height }) {
  if (panel.type === 'timeseries') {
    if (!frames.length) return <div>{panel.fieldConfig.defaults.noValue ?? 'No data'}</div>;
    return <TimeSeries frames={frames} timeRange={range} timeZone="utc" width={width} height={height} legend={panel.options.legend} />;
  }
  if (panel.type === 'table') {
    return <Table data={frames[0]} width={width} height={height} />;
  }
  const values = displayed(panel, frames);
  const one = ({ value, width, height, count }) => (
    <BigValue value={value.display} theme={theme} width={width} height={height} count={count} colorMode={panel.options.colorMode}
      graphMode="none" justifyMode={panel.options.justifyMode} textMode={panel.options.textMode} />
  );
  return (
    <VizRepeater getValues={() => values} renderValue={one} width={width} height={height} source={frames} renderCounter={0}
      orientation="auto" itemSpacing={8} autoGrid />
  );
}

function places(panels) {
  if (window.innerWidth >= NARROW) {
    const placed = panels.map(({ gridPos: at }) => ({ left: at.x * COLUMN, top: at.y * ROW, width: at.w * COLUMN - GAP, height: at.h * ROW - GAP }));
    return { placed, columns: 24 * COLUMN };
  }
  const columns = window.innerWidth - 2 * PADDING;
  const rows = panels.map(({ gridPos: at }) => at.h);
  const placed = rows.map((h, i) => ({ left: 0, top: ROW * rows.slice(0, i).reduce((a, b) => a + b, 0), width: columns, height: h * ROW - GAP }));
  return { placed, columns };
}

function Board({ dashboard, frames, range }) {
  const { placed, columns } = places(dashboard.panels);
  const bottom = Math.max(...placed.map((at) => at.top + at.height)) + GAP;
  return (
    <ThemeContext.Provider value={theme}>
      <GlobalStyles />
      <div style={{ width: columns + 2 * PADDING, boxSizing: 'border-box', background: theme.colors.background.canvas, padding: PADDING }}>
        <div style={{ fontSize: 20, fontWeight: 500, marginBottom: 2 }}>{dashboard.title}</div>
        <div style={{ color: theme.colors.text.secondary, marginBottom: 10 }}>{dashboard.description}</div>
        <div style={{ position: 'relative', height: bottom }}>
          {dashboard.panels.map((panel, i) => (
            <div key={panel.id} data-panel={panel.title} style={{ position: 'absolute', ...placed[i] }}>
              <PanelChrome title={panel.title} width={placed[i].width} height={placed[i].height}>
                {(inner, outer) => <Content panel={panel} frames={frames[panel.id]} range={range} width={inner} height={outer} />}
              </PanelChrome>
            </div>
          ))}
        </div>
      </div>
    </ThemeContext.Provider>
  );
}

window.draw = async ({ dashboard, answers, from, to }) => {
  await Promise.all(['400', '500'].map((weight) => document.fonts.load(`${weight} 12px Inter`)));
  const range = { from: dateTime(from * 1000), to: dateTime(to * 1000), raw: { from: 'now-5m', to: 'now' } };
  const frames = {};
  for (const panel of dashboard.panels) frames[panel.id] = await framesOf(panel, answers[panel.id]);
  createRoot(document.getElementById('board')).render(<Board dashboard={dashboard} frames={frames} range={range} />);
  await new Promise((resolve) => setTimeout(resolve, 1500));
};

// What a panel shows: its words and, of lines, how many pixels of its canvas are not empty.
window.shown = () =>
  [...document.querySelectorAll('[data-panel]')].map((panel) => {
    const canvas = panel.querySelector('canvas');
    const drawn = canvas && canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data.filter((v, i) => i % 4 === 3 && v).length;
    return { title: panel.dataset.panel, words: panel.innerText, drawn: drawn ?? null };
  });
